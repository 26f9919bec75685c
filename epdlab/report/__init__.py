"""The report: claims about upstream, numbers from results, figures from runs and code, joined by the build."""
