"""EuroSAT's classes in the words that CLIP's authors use; the archive's folders are called otherwise."""

from __future__ import annotations

WORDS = {
    "AnnualCrop": "annual crop land",
    "Forest": "forest",
    "HerbaceousVegetation": "brushland or shrubland",
    "Highway": "highway or road",
    "Industrial": "industrial buildings or commercial buildings",
    "Pasture": "pasture land",
    "PermanentCrop": "permanent crop land",
    "Residential": "residential buildings or homes or apartments",
    "River": "river",
    "SeaLake": "lake or sea",
    "Sea or Lake": "lake or sea",
}
