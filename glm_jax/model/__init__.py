"""The GLM-5 network as pure functions over Flax NNX modules; see README.md for the shape letters."""
