"""What a program calls: a model that answers, a checkpoint made smaller. `onegraph` hands these names out lazily."""

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # (what is being done, how much of it is, how much there is or 0)
