"""The `fused` operation set: a decoder layer in five launches, for small batches. All but `tiling` needs triton."""
