"""Training: `train(load_recipe("recipe.yaml"))`."""

from allyouneed.training.recipe.file import load_recipe as load_recipe
from allyouneed.training.recipe.recipe import Recipe as Recipe
from allyouneed.training.signals import Interrupted as Interrupted
from allyouneed.training.start import Result as Result
from allyouneed.training.start import train as train
