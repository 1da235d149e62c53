"""Sources → prepared corpora in the cache."""
