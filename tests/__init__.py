"""Tests. Modules without `test_` in their name build what several of them need."""
