"""Training: `train(load_recipe("recipe.yaml"))`."""

from allyouneed.train.recipe.file import load_recipe as load_recipe
from allyouneed.train.recipe.recipe import Recipe as Recipe
from allyouneed.train.signals import Interrupted as Interrupted
from allyouneed.train.start import Result as Result
from allyouneed.train.start import train as train
