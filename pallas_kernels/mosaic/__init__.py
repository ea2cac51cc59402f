"""What the Mosaic GPU kernels share: the bridge between JAX versions and pieces of inline PTX."""
