"""Labels that `mmaccel bench` and its measurements share."""

ALL = "all"
"""Every policy, or every setup of canvas policies."""
