"""Tasks register by being defined."""

from allyouneed.tasks import translation as translation
