"""Programs for the environment of an exporter: each file stands alone and is never imported."""
