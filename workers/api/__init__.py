"""What clients ask for and get, whatever carries it: fields, grammars, tokens and text. Start at terms.py."""
