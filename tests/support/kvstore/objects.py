"""Small objects for the tests of page stores."""

from random import Random

from tidemill.kvstore.keys import Kind, ObjectKey, PageKey


def page(number: int, kind: Kind = Kind.PAGE) -> ObjectKey:
    return ObjectKey(kind, PageKey(number.to_bytes(16, "big")))


def random_body(number: int, num_bytes: int) -> bytearray:
    return bytearray(Random(number).randbytes(num_bytes))
