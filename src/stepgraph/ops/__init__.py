"""Operations of a decoder step: a torch reference and a Triton kernel side by side."""
