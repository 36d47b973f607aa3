"""The status page in a headless Chromium: `make browser`."""
