"""`bench paper`: the published results of this method (arXiv 2604.06956), measured again at a small scale."""
