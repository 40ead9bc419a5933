"""One lock for everything that loads a model."""

import threading

LOADING = threading.Lock()
"""transformers loads with switches of the whole process (which weights are made, tied, initialised): two threads that
load at once leave models with weights missing, and the process unable to load another. Held while scoring too."""
