//! A record as an object of JSON.

use crate::{
    json::{list, number, object, quoted},
    sink::{Histogram, Picture, Record, Value},
};

pub(super) fn of(record: &Record) -> String {
    let values = object(record.values.iter().map(|(name, value)| (name, of_value(value))));
    object([
        ("step", record.step.to_string()),
        ("epoch", record.epoch.to_string()),
        ("time", number(record.seconds())),
        ("values", values),
    ])
}

fn of_value(value: &Value) -> String {
    match value {
        Value::Scalar(x) => number(*x),
        Value::Text(text) => object([("text", quoted(text))]),
        Value::Histogram(histogram) => object([("histogram", of_histogram(histogram))]),
        Value::Image(image) => object([("image", of_image(image))]),
    }
}

fn of_histogram(h: &Histogram) -> String {
    object([
        ("min", number(h.min)),
        ("max", number(h.max)),
        ("sum", number(h.sum)),
        ("sum_squares", number(h.sum_squares)),
        ("limits", list(h.limits.iter().map(|&x| number(x)))),
        ("counts", list(h.counts.iter().map(u64::to_string))),
        ("not_finite", h.not_finite.to_string()),
    ])
}

fn of_image(image: &Picture) -> String {
    object([
        ("width", image.width().to_string()),
        ("height", image.height().to_string()),
        ("channels", image.channels().to_string()),
    ])
}
