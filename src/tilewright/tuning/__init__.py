"""`tilewright tune`: which route and which launch is the quickest of those that are right."""
