"""The three-step tuner: which draft length and sparsity ratio for a model, a load and a GPU?"""
