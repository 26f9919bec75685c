"""The report: claims about upstream, numbers from results, figures from runs and code, and the build that joins them."""
