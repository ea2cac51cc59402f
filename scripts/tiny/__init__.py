"""Training of the embedded model: data, model, optimiser, evaluation and export."""
