"""The GLM-5 network as functions over Flax NNX modules; README.md has the shape letters."""
