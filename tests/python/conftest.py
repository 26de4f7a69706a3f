"""Settings of all tests."""

from hypothesis import settings

# No deadline: a slow machine is no error. Derandomised: a run says the same thing twice.
settings.register_profile("kvspan", deadline=None, derandomize=True)
settings.load_profile("kvspan")
