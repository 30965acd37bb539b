"""The server half: decoding of uploaded models."""

from __future__ import annotations

from flwr.app import RecordDict

from raceme.core.feature import Feature, FeatureContext
from raceme.core.messages import ARRAYS, InvalidReplyError
from raceme.features.short_upload import Options
from raceme.features.short_upload.codes import SCALES, decoded


class ShortUpload(Feature):
    """Clients upload trained models with 8 bits per weight."""

    options_type = Options
    client = "raceme.features.short_upload.client:work"
    upload_size = 0.25

    @property
    def is_on(self) -> bool:
        """Whether the key ``upload`` is ``int8``."""
        return bool(self.options.upload == "int8")

    def on_reply(self, content: RecordDict, context: FeatureContext) -> RecordDict:
        """Return the content with the codes decoded, if there are any."""
        records = dict(content)
        scales = records.pop(SCALES, None)
        if scales is None:
            return content
        if ARRAYS not in content.array_records or SCALES not in content.array_records:
            raise InvalidReplyError("scales without codes")
        codes = content.array_records[ARRAYS]
        records[ARRAYS] = decoded(codes, content.array_records[SCALES])
        return RecordDict(records)
