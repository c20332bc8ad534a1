"""Settings of all tests: Hypothesis draws the same examples on every run, and no example has a deadline.

To search further than the fixed examples: HYPOTHESIS_PROFILE=search python -m pytest
"""

import os

from hypothesis import settings

settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("search", derandomize=False, deadline=None, max_examples=1000)
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "fixed"))
