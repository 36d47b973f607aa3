"""One forward pass: tensors of a step, the model runner, sampling, grammars, drafts."""
