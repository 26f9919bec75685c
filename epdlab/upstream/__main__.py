"""`python -m epdlab.upstream`."""

import os

os.environ.setdefault("GLOG_minloglevel", "3")  # read at import; the engine logs an error at every healthy start

from .run import main

raise SystemExit(main())
