"""The closed vocabulary of the keeper's world; each word is one token of its tokenizer."""

# ruff: noqa: SIM905 (a line of words is read faster than a column of quoted ones)

NAMES: tuple[str, ...] = tuple(
    "Alice Bob Carol David Emma Frank Grace Henry Irene Jack Karen Leo Maria Nina Oscar Paul Quinn Rosa Sam "
    "Tina Umar Vera Walter Xenia Yusuf Zoe Anton Bella Cyrus Diana Ella Felix Gina Hugo Ivan Julia Kofi Lena "
    "Milo Nora Omar Petra Rahul Sofia Tariq Uma Victor Wendy".split()
)
OBJECTS: tuple[str, ...] = tuple(
    "key lamp book coin map ring hat drum flute vase mirror letter candle basket compass rope camera watch "
    "scarf umbrella hammer kettle pillow guitar helmet bottle whistle ladder blanket statue necklace "
    "telescope violin bucket anchor crown ticket brush knife puzzle".split()
)
PLACES: tuple[str, ...] = tuple(
    "harbor garden tower kitchen library museum station market cellar attic bridge forest castle bakery "
    "temple school office theater stable lighthouse cave barn chapel palace tavern factory hospital airport "
    "stadium mill studio gallery meadow island tunnel cottage".split()
)
COLORS: tuple[str, ...] = tuple(
    "red blue green yellow purple orange black white silver golden pink brown".split()
)
FOODS: tuple[str, ...] = tuple(
    "apples bread cheese honey rice soup grapes olives pasta cherries noodles tea coffee pancakes walnuts "
    "mangoes".split()
)
