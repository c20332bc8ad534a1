"""Example recipes, one folder each, runnable as they stand; installed so that `ravnest-fed demo` finds them."""
