"""Which word somebody meant, for errors."""

import difflib
from collections.abc import Iterable


def closest(word: str, known: Iterable[str]) -> str | None:
    """The known word that is close to `word` or begins with it; dashes in front of either do not count."""
    names = {name.lstrip("-"): name for name in sorted(known)}
    bare = word.lstrip("-")
    longer = [name for name in names if len(bare) > 1 and name.startswith(bare)]
    close = longer or difflib.get_close_matches(bare, names)
    return names[close[0]] if close else None


def suggestion(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the `closest` known word, "" where there is none."""
    name = closest(word, known)
    return "" if name is None else f"; did you mean {name}?"
