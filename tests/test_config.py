"""Config: every spelling of PITFALLS R45 gives the intended value or one clear line; values are checked together."""

import json

import pytest
from ml_collections import ConfigDict

from vitplast_jax.errors import UserError
from vitplast_jax.training import config as settings

GOOD = [  # key, as given, the intended value
    ("steps", "1e3", 1000),
    ("steps", "1000", 1000),
    ("steps", 1000.0, 1000),
    ("batch_size", " 64 ", 64),
    ("seed", "4294967295", 4294967295),
    ("learning_rate", "1e-3", 0.001),
    ("learning_rate", 1, 1.0),
    ("learning_rate", "3", 3.0),
    ("clip_norm", "0", 0.0),
    ("data.flip", "false", False),
    ("data.flip", "True", True),
    ("data.flip", "0", False),
    ("data.flip", True, True),
    ("trainable", "mha", ("mha",)),
    ("trainable", "mha,fc1@0-5", ("mha", "fc1@0-5")),
    ("trainable", ("mha,fc1@0-5", "ln1@11"), ("mha", "fc1@0-5", "ln1@11")),
    ("trainable", ["mha", "fc1"], ("mha", "fc1")),
    ("trainable", "('mha', 'fc1')", ("mha", "fc1")),
    ("also_trainable", "", ()),
    ("also_trainable", "()", ()),
    ("also_trainable", (), ()),
    ("learning_rate_factors", "head=10,ln1@0-5=0.1", ("head=10", "ln1@0-5=0.1")),
    ("learning_rate_factors", [], ()),
    ("data.crop_scale", "0.5,1", (0.5, 1.0)),
    ("data.crop_scale", "(0.5, 1.0)", (0.5, 1.0)),
    ("data.crop_scale", "()", ()),
    ("data.mean", "0.5", (0.5,)),
    ("data.mean", (0.485, 0.456, 0.406), (0.485, 0.456, 0.406)),
    ("image_size", "224", (224, 224)),
    ("image_size", "224,160", (224, 160)),
    ("image_size", "224x160", (224, 160)),
    ("image_size", 224, (224, 224)),
    ("image_size", (224, 160), (224, 160)),
    ("image_size", "0", ()),
    ("image_size", (), ()),
    ("microbatch", "auto", "auto"),
    ("microbatch", "32", "32"),
    ("weights", "hf-hub:timm/vit_base", "hf-hub:timm/vit_base"),
    ("mesh.data", "-1", -1),
    ("optimizer", "adamw", "adamw"),
]

BAD = [  # key, as given
    ("steps", "1.5"),
    ("steps", 1000.5),
    ("steps", "many"),
    ("steps", 0),
    ("steps", True),
    ("steps", None),
    ("steps", "nan"),
    ("steps", "inf"),
    ("batch_size", -1),
    ("seed", "-1"),
    ("seed", 2**32),
    ("learning_rate", "nan"),
    ("learning_rate", "inf"),
    ("learning_rate", "0"),
    ("learning_rate", True),
    ("learning_rate", (0.1,)),
    ("data.flip", "maybe"),
    ("data.flip", 3),
    ("data.validation", 1.0),
    ("data.crop_scale", "0.5"),
    ("data.crop_scale", "1,0.5"),
    ("data.crop_scale", "0.5,1.5"),
    ("data.crop_ratio", "()"),
    ("data.std", "0"),
    ("data.mean", "0.5,0.5"),
    ("trainable", ""),
    ("trainable", "mha fc1"),
    ("trainable", "mha@"),
    ("trainable", (1,)),
    ("learning_rate_factors", "head"),
    ("learning_rate_factors", "head=fast"),
    ("learning_rate_factors", "head=-1"),
    ("image_size", "224,160,3"),
    ("image_size", "-224"),
    ("image_size", "big"),
    ("microbatch", "0"),
    ("microbatch", "some"),
    ("weights", 3),
    ("weights", None),
    ("mesh.data", 0),
    ("mesh.data", -2),
    ("optimizer", "adam"),
    ("optimizer", ("sgd",)),
    ("data.interpolation", "nearest"),
]


@pytest.mark.parametrize(("key", "given", "value"), GOOD)
def test_value_is_read_as_intended(key, given, value):
    result = settings.read(key, given)
    assert result == value and type(result) is type(value)


@pytest.mark.parametrize(("key", "given"), BAD)
def test_wrong_value_is_one_line_with_key_value_and_what_is_allowed(key, given):
    with pytest.raises(UserError) as error:
        settings.read(key, given)
    line = str(error.value)
    assert line == f"config.{key} is {given!r}; allowed: {settings.FIELDS[key].allowed}" and "\n" not in line


@pytest.mark.parametrize(
    ("typo", "meant"),
    [
        ("stps", "steps"),
        ("data.nmae", "data.name"),
        ("dat.name", "data.name"),
        ("crop_scale", "data.crop_scale"),
        ("learningrate", "learning_rate"),
        ("mesh.fsp", "mesh.fsdp"),
    ],
)
def test_unknown_key_names_the_nearest(typo, meant):
    with pytest.raises(UserError, match=f"config.{typo} does not exist; did you mean config.{meant}\\?"):
        settings.read(typo, 1)


def test_a_group_is_no_key_and_nonsense_has_no_near_key():
    with pytest.raises(UserError, match="config.mesh is a group of mesh.data, mesh.fsdp"):
        settings.read("mesh", 1)
    with pytest.raises(UserError, match="config.qqqqq does not exist; --help lists the keys"):
        settings.read("qqqqq", 1)


def test_defaults_are_sound_canonical_and_free_of_none_and_lists():
    for key, field in settings.FIELDS.items():
        value = field.read(field.default)
        assert value == field.default and type(value) is type(field.default), key
        assert isinstance(value, (str, bool, int, float, tuple)), key
        assert field.allowed and "\n" not in field.allowed + field.meaning, key
    assert settings.validate(settings.default_config()) == settings.default_config()


def test_paper_defaults():
    # ORACLES A3: SGD with momentum, no weight decay, warm-up 2000, clip 1, batch 512, crops 0.08-1 and 3/4-4/3, flips
    config = settings.default_config()
    assert (config.optimizer, config.momentum, config.weight_decay) == ("sgd", 0.9, 0.0)
    assert (config.warmup_steps, config.clip_norm, config.batch_size, config.label_smoothing) == (2000, 1.0, 512, 0.0)
    assert config.data.crop_scale == (0.08, 1.0) and config.data.flip and config.data.interpolation == "bilinear"
    assert config.data.crop_ratio == pytest.approx((0.75, 1.3333333333))
    assert config.also_trainable == ("head", "final_norm")


def test_validate_returns_a_new_locked_config():
    given = settings.default_config()
    given.trainable = ("mha,fc1",)
    checked = settings.validate(given)
    assert checked.trainable == ("mha", "fc1") and given.trainable == ("mha,fc1",)
    with pytest.raises(AttributeError):
        checked.lerning_rate = 1.0


def test_validate_fills_in_what_is_missing():
    checked = settings.validate({"steps": 5000, "data": {"name": "digits"}})
    assert (checked.steps, checked.data.name, checked.data.flip, checked.batch_size) == (5000, "digits", True, 512)


def test_all_problems_come_in_one_line():
    with pytest.raises(UserError) as error:
        settings.validate(ConfigDict({"stps": 3, "optimizer": "lion", "data": {"validation": 2.0, "nmae": "x"}}))
    line = str(error.value)
    assert line.count("; ") >= 3 and "\n" not in line
    for part in ("config.steps?", "config.optimizer is 'lion'", "config.data.validation is 2.0", "config.data.name?"):
        assert part in line


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"batch_size": 64, "accumulation": 3}, "accumulation is 3, which does not divide config.batch_size 64"),
        ({"batch_size": 64, "microbatch": "48"}, "microbatch is 48, which does not divide config.batch_size 64"),
        ({"batch_size": 64, "microbatch": "32", "accumulation": 2}, "say the same thing twice"),
        ({"steps": 10, "warmup_steps": 11}, "warmup_steps is 11, more than config.steps 10"),
        ({"data": {"mean": (0.5,)}}, "given together"),
    ],
)
def test_values_that_contradict_each_other(values, message):
    with pytest.raises(UserError, match=message):
        settings.validate({"warmup_steps": 0, **values})


def test_json_round_trip_keeps_every_bit():
    config = settings.validate(
        {"learning_rate": 0.1 + 0.2, "seed": 2**32 - 1, "trainable": "mha,fc1", "image_size": "224,160"}
    )
    text = settings.to_json(config)
    again = settings.validate(json.loads(text))
    assert again == config and again.learning_rate == 0.30000000000000004
    assert settings.to_json(again) == text and isinstance(again.data.crop_scale, tuple)
