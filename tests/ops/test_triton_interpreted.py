"""The Triton kernels against the reference without a GPU, in a process of their own: Triton reads the variable once."""

from ops.interpreter import check_interpreted


def test_the_triton_kernels_agree_with_the_reference_under_the_interpreter() -> None:
    check_interpreted("interpreted.py")
