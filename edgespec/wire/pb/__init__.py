"""Generated from ``protos/edgespec/v1`` by ``protos/generate.py``; do not edit."""
