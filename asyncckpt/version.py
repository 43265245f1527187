"""Version of the library, as the package metadata and every commit record state it."""

VERSION = "0.1.0"
