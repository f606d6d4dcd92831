"""The tests. Ray reads these variables when it is imported; `make env` gives them to every process of .venv as well."""

import os

os.environ["RAY_AUTH_MODE"] = "token"
os.environ["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"  # a cluster on loopback only
