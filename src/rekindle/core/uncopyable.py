"""Objects that are bound to a model in this process, and can be neither copied nor pickled."""

from __future__ import annotations

from typing import NoReturn


class Uncopyable:
    """Refuses to be copied or pickled: a copy would hold half of what it works on.

    >>> import copy
    >>> copy.copy(Uncopyable())
    Traceback (most recent call last):
    TypeError: an Uncopyable cannot be pickled or copied: it is bound to the model that it trains. \
Save model.state_dict() and optimizer.state_dict(), the plan with rekindle.save_plan, and call \
optimize again.
    """

    def __reduce__(self) -> NoReturn:
        """Refuse, with what to do instead."""
        name = type(self).__name__
        article = "an" if name[0] in "AEIOU" else "a"
        raise TypeError(
            f"{article} {name} cannot be pickled or copied: it is bound to the model that it "
            "trains. Save model.state_dict() and optimizer.state_dict(), the plan with "
            "rekindle.save_plan, and call optimize again."
        )
