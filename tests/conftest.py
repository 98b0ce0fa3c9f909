"""A developer's own choice of backend must not decide what the tests see."""

import os

os.environ.pop("TILEWRIGHT_BACKEND", None)
