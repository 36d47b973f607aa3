"""Convert the fields of a client to engine requests: parameters, messages, tools, grammars."""
