"""`python -m epdlab.upstream`."""

from .run import main

raise SystemExit(main())
