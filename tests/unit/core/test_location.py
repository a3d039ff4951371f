from __future__ import annotations

import pytest

from megamind_ray.core.location import parse_location
from megamind_ray.errors import RequestError


@pytest.mark.parametrize(
    ("uri", "is_bucket"),
    [
        ("s3://root", True),
        ("S3://root/", True),
        ("gs://root//", True),
        ("az://container", True),
        ("s3://root/llama", False),
        ("https://host", False),
        ("memory://root", False),
        ("/root", False),
    ],
)
def test_a_bucket_is_told_from_what_is_in_it(uri: str, is_bucket: bool) -> None:
    assert parse_location(uri).is_bucket is is_bucket


@pytest.mark.parametrize("uri", ["s3://", "s3:///", "s3:///llama", "https:///llama"])
def test_an_address_without_a_bucket_or_host_is_refused(uri: str) -> None:
    with pytest.raises(RequestError, match="names no bucket, host or repository"):
        parse_location(uri)
