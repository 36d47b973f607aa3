"""The keeper: a small hybrid model that recalls facts, with its data, its training and its evaluation."""
