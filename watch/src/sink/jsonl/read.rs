//! Lines of JSON as records.

use std::{
    fs::File,
    io::{BufRead, BufReader},
    path::Path,
    time::{Duration, UNIX_EPOCH},
};

use numcore::{Error, Result, Within};
use serde_json::{Map, Value as Json};

use crate::{
    json::read_number,
    sink::{Histogram, Record, Value},
};

/// Reads the lines that [`Jsonl`](super::Jsonl) wrote. Values come in the order of their names; pictures, of which only
/// the sizes were written, are left out. If a run went back to a checkpoint, the earlier lines of steps that were
/// measured again are left out too.
///
/// # Errors
/// An error if the file cannot be read, or a line of it is malformed.
#[track_caller]
pub fn read_jsonl(path: impl AsRef<Path>) -> Result<Vec<Record>> {
    let path = path.as_ref();
    let file = File::open(path).map_err(|e| Error::io(path, e)).at_caller()?;
    let mut records: Vec<Record> = Vec::new();
    for (i, line) in BufReader::new(file).lines().enumerate() {
        let line = line.map_err(|e| Error::io(path, e)).at_caller()?;
        let wrong = |why: String| Error::format(format!("{} line {}", path.display(), i + 1), why);
        let record = parsed(line.as_bytes()).map_err(wrong).at_caller()?;
        while records.last().is_some_and(|last| last.step > record.step) {
            records.pop();
        }
        match records.last_mut().filter(|last| last.step == record.step) {
            Some(last) => merge(last, record),
            None => records.push(record),
        }
    }
    Ok(records)
}

/// Reads one line, or says what is wrong with it.
pub(crate) fn parsed(line: &[u8]) -> std::result::Result<Record, String> {
    let json: Json = serde_json::from_slice(line).map_err(|e| e.to_string())?;
    record(&json).ok_or_else(|| "is no object of step, epoch, time and values".into())
}

/// Merges a later line of a step into the record. A step can have several lines, from evaluations before the first step
/// of a resumed run or from the end of a run. A name that is measured again has its new value.
fn merge(into: &mut Record, later: Record) {
    for (name, value) in later.values {
        match into.values.iter_mut().find(|(known, _)| *known == name) {
            Some(known) => known.1 = value,
            None => into.values.push((name, value)),
        }
    }
    (into.epoch, into.fraction, into.time) = (later.epoch, later.fraction, later.time);
    into.values.sort_by(|a, b| a.0.cmp(&b.0));
}

fn record(json: &Json) -> Option<Record> {
    let values = json.get("values")?.as_object()?;
    let read = values.iter().map(|(name, json)| Some((name.clone(), value(json)?)));
    let values: Option<Vec<(String, Option<Value>)>> = read.collect();
    let seconds = Duration::try_from_secs_f64(json.get("time")?.as_f64()?).ok()?;
    Some(Record {
        step: json.get("step")?.as_u64()?,
        epoch: json.get("epoch")?.as_u64()?,
        fraction: None,
        time: UNIX_EPOCH.checked_add(seconds)?,
        values: values?.into_iter().filter_map(|(name, value)| Some((name, value?))).collect(),
    })
}

/// Reads a value; none within for a picture, of which only the sizes were written.
fn value(json: &Json) -> Option<Option<Value>> {
    let Some(object) = json.as_object() else { return Some(Some(Value::Scalar(read_number(json)?))) };
    let (kind, what) = object.iter().next().filter(|_| object.len() == 1)?;
    match kind.as_str() {
        "text" => Some(Some(Value::Text(what.as_str()?.into()))),
        "histogram" => Some(Some(Value::Histogram(histogram(what.as_object()?)?))),
        "image" => Some(None),
        _ => None,
    }
}

fn histogram(h: &Map<String, Json>) -> Option<Histogram> {
    let of = |name: &str| read_number(h.get(name)?);
    let list = |name: &str| h.get(name)?.as_array();
    let histogram = Histogram {
        min: of("min")?,
        max: of("max")?,
        sum: of("sum")?,
        sum_squares: of("sum_squares")?,
        limits: list("limits")?.iter().map(read_number).collect::<Option<_>>()?,
        counts: list("counts")?.iter().map(Json::as_u64).collect::<Option<_>>()?,
        not_finite: h.get("not_finite")?.as_u64()?,
    };
    (histogram.limits.len() == histogram.counts.len()).then_some(histogram)
}
