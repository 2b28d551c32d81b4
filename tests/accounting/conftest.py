"""No result may come from an earlier run's cache."""

import os

os.environ["DPULR_CACHE"] = "off"
