"""Versions of the library and of the messages between its processes."""

VERSION = "0.1.0"
"""Version in the package metadata and in every commit record."""

PROTOCOL = 3
"""Version of all messages between the processes of a job; raise it with every change of a message.

(test_messages_change_only_with_the_protocol)
"""
