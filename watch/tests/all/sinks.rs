//! What is written can be read, again after a restart, and what cannot be written is an error with the path.

use std::{
    fs,
    io::{self, Write},
    sync::{Arc, Mutex},
    time::{Duration, UNIX_EPOCH},
};

use crate::folder::Folder;
use watch::sink::{
    Histogram, Jsonl, Many, MemorySink, Mlflow, Picture, Record, Sink, TensorBoard, Terminal, Value, Wandb, read_jsonl,
};

fn record(step: u64, seconds: f64) -> Record {
    Record { time: UNIX_EPOCH + Duration::from_secs_f64(seconds), ..Record::new(step, step / 10) }
}

#[test]
fn a_line_of_json_is_what_was_measured() {
    let folder = Folder::new("jsonl");
    let values = [("loss", 0.1), ("bad", f64::NAN), ("big", f64::NEG_INFINITY), ("tiny", 5e-324), ("zero", -0.0)];
    let all = values.iter().fold(record(12, 1.25), |r, (name, x)| r.scalar(*name, *x));
    let all = all.with("a\"b", Value::Text("<NaN>\n\u{1}é".into()));
    let all = all.with("weights", Value::Histogram(Histogram::of(&[1.0f32, -2.0, f32::INFINITY])));
    let all = all.with("picture", Value::Image(Picture::new(1, 1, 1, vec![7]).unwrap()));
    let mut sink = Jsonl::in_folder(folder.path("new/run")).unwrap();
    sink.write(&all).unwrap();
    let text = fs::read_to_string(sink.path()).unwrap();
    assert!(
        text.starts_with("{\"step\":12,\"epoch\":1,\"time\":1.25,\"values\":{\"loss\":0.1,\"bad\":\"NaN\","),
        "{text}"
    );
    assert_eq!(text.lines().count(), 1);

    let read = read_jsonl(sink.path()).unwrap().remove(0);
    assert_eq!((read.step, read.epoch, read.time), (12, 1, all.time));
    assert_eq!(read.values.len(), all.values.len() - 1, "the picture alone is left out");
    for (name, value) in &read.values {
        let (_, was) = all.values.iter().find(|(n, _)| n == name).unwrap();
        match (value, was) {
            (Value::Scalar(a), Value::Scalar(b)) => assert!(a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan())),
            _ => assert_eq!(value, was),
        }
    }
}

#[test]
fn a_resumed_run_goes_on_after_its_checkpoint() {
    let folder = Folder::new("resumed");
    let mut sink = Jsonl::in_folder(&folder).unwrap();
    for step in 1..=5 {
        // Not a number at first, which is no least one.
        let odd = if step == 1 { f64::NAN } else { step as f64 };
        sink.write(&record(step, step as f64).scalar("loss", 10.0 - step as f64).scalar("odd", odd)).unwrap();
    }
    drop(sink);
    // Killed while it wrote a line.
    let path = folder.path("metrics.jsonl");
    let mut file = fs::OpenOptions::new().append(true).open(&path).unwrap();
    file.write_all(b"{\"step\":6,\"epo").unwrap();
    let mut sink = Jsonl::in_folder(&folder).unwrap();
    (4..=6).for_each(|step| sink.write(&record(step, step as f64).scalar("loss", 100.0)).unwrap());
    sink.flush().unwrap();
    let losses: Vec<(u64, f64)> =
        read_jsonl(&path).unwrap().iter().map(|r| (r.step, r.scalars().next().unwrap().1)).collect();
    assert_eq!(losses, [(1, 9.0), (2, 8.0), (3, 7.0), (4, 100.0), (5, 100.0), (6, 100.0)]);
    let summary: serde_json::Value =
        serde_json::from_str(&fs::read_to_string(folder.path("summary.json")).unwrap()).unwrap();
    assert_eq!((summary["step"].as_u64(), summary["seconds"].as_f64()), (Some(6), Some(5.0)));
    let of = |name: &str| ["last", "min", "max"].map(|which| summary["scalars"][name][which].as_f64().unwrap());
    assert_eq!([of("loss"), of("odd")], [[100.0, 5.0, 100.0], [5.0, 2.0, 5.0]]);
}

#[test]
fn long_torn_lines_are_cut_too() {
    let folder = Folder::new("torn");
    for torn in [0, 1, 4095, 4096, 4097, 20_000] {
        let path = folder.file("metrics.jsonl", "");
        let mut sink = Jsonl::in_folder(&folder).unwrap();
        sink.write(&record(1, 1.0)).unwrap();
        drop(sink);
        let whole = fs::read(&path).unwrap();
        fs::write(&path, [&whole[..], &vec![b'x'; torn]].concat()).unwrap();
        drop(Jsonl::in_folder(&folder).unwrap());
        assert_eq!(fs::read(&path).unwrap(), whole, "{torn} bytes torn off");
        fs::write(&path, vec![b'x'; torn]).unwrap();
        drop(Jsonl::in_folder(&folder).unwrap());
        assert_eq!(fs::read(&path).unwrap(), b"", "nothing but {torn} torn bytes");
    }
}

#[test]
fn malformed_lines_are_errors_that_say_where() {
    let folder = Folder::new("malformed");
    let good = "{\"step\":1,\"epoch\":0,\"time\":1.0,\"values\":{}}\n";
    for bad in ["nonsense", "[]", "{\"step\":1}", "{\"step\":1,\"epoch\":0,\"time\":1,\"values\":{\"a\":\"nan\"}}"] {
        let path = folder.file("metrics.jsonl", format!("{good}{bad}\n"));
        for error in [read_jsonl(&path).unwrap_err(), Jsonl::in_folder(&folder).unwrap_err()] {
            assert!(error.to_string().contains("metrics.jsonl line 2: "), "{error}");
        }
    }
}

#[test]
fn where_nothing_can_be_written_is_an_error_with_the_path() {
    let folder = Folder::new("file");
    let file = folder.file("occupied", "a file");
    let errors = [Jsonl::in_folder(&file).unwrap_err(), TensorBoard::in_folder(&file).unwrap_err()];
    for error in errors.iter().map(ToString::to_string) {
        assert!(error.contains("occupied"), "{error}");
    }
}

/// The data of the records of an event file.
fn events(bytes: &[u8]) -> Vec<Vec<u8>> {
    let (mut rest, mut all) = (bytes, Vec::new());
    while !rest.is_empty() {
        let length = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        all.push(rest[12..12 + length].to_vec());
        rest = &rest[12 + length + 4..];
    }
    all
}

#[test]
fn every_run_has_an_event_file_of_its_own() {
    let folder = Folder::new("tensorboard");
    let mut first = TensorBoard::in_folder(folder.path("run")).unwrap();
    let mut second = TensorBoard::in_folder(folder.path("run")).unwrap();
    let name = first.path().file_name().unwrap().to_str().unwrap().to_string();
    let parts: Vec<&str> = name.split('.').collect();
    assert_eq!(parts[..3], ["events", "out", "tfevents"]);
    assert!(parts[3].len() == 10 && parts[5] == std::process::id().to_string(), "{name}");
    assert_ne!(first.path(), second.path());
    first.write(&record(1, 2.0).scalar("loss", 0.5)).unwrap();
    first.flush().unwrap();
    second.write(&record(2, 3.0).scalar("loss", f64::NAN)).unwrap();
    let path = second.path().to_path_buf();
    drop(second);
    for (path, step) in [(first.path(), 1u8), (&path, 2)] {
        let mut events = events(&fs::read(path).unwrap());
        assert!(events.remove(0).ends_with(b"\x1a\x0dbrain.Event:2"));
        // What the first file has of step 2 and later ones is of before: a `SessionLog` of status `START`.
        assert_eq!(events.len(), usize::from(step));
        assert!(step == 1 || events[0].ends_with(b"\x10\x02\x3a\x02\x08\x01"), "{events:x?}");
        assert!(events.iter().all(|event| event[9..11] == [0x10, step]), "{events:x?}");
    }
}

#[derive(Clone, Default)]
struct Shared(Arc<Mutex<Vec<u8>>>);

impl Write for Shared {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().unwrap().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[test]
fn plain_lines_come_now_and_then_and_at_the_end() {
    let out = Shared::default();
    let mut terminal = Terminal::lines_to(out.clone()).steps(100).show(["loss", "absent", "lr"]);
    for step in 51..=99 {
        let values = record(step, step as f64).scalar("lr", 3e-4).scalar("grad_norm", 1.0).scalar("loss", 2.0);
        terminal.write(&values).unwrap();
    }
    terminal.flush().unwrap();
    terminal.flush().unwrap();
    let text = String::from_utf8(out.0.lock().unwrap().clone()).unwrap();
    let numbers = "  loss 2.0000  lr 3.000e-4\n";
    let due =
        [(51, ""), (61, "  39s left"), (71, "  29s left"), (81, "  19s left"), (91, "  9s left"), (99, "  1s left")];
    let expected: String = due.iter().map(|(step, left)| format!("step {step}/100{left}{numbers}")).collect();
    assert_eq!(text, expected);
}

#[test]
fn what_a_terminal_would_obey_is_not_shown() {
    let out = Shared::default();
    let mut terminal = Terminal::lines_to(out.clone());
    let text = Value::Text("a\u{1b}[2Jb\nc".into());
    terminal.write(&record(1, 1.0).scalar("x\u{7}\u{9b}", f64::NAN).with("sample\r", text)).unwrap();
    assert_eq!(String::from_utf8_lossy(&out.0.lock().unwrap()), "step 1  x NaN\nsample: a[2Jb\nc\n");
}

#[test]
fn a_loss_that_is_not_finite_is_said_once() {
    let all: Vec<Record> =
        [1.0, f64::NAN, f64::NAN].iter().zip(1..).map(|(x, k)| record(k, 0.0).scalar("loss", *x)).collect();
    let lines = lines_of(|terminal| terminal, &all);
    let told: Vec<&String> = lines.iter().filter(|line| line.starts_with("warning: ")).collect();
    assert_eq!(told, ["warning: the loss of step 2 is NaN; `NonFinite::stop()` ends a run there"]);
}

#[test]
fn one_failing_sink_keeps_no_record_from_the_others() {
    struct Broken;
    impl Sink for Broken {
        fn write(&mut self, _: &Record) -> numcore::Result<()> {
            Err(numcore::Error::io("here", io::ErrorKind::StorageFull.into()))
        }
    }
    let seen = MemorySink::new();
    let mut all = Many::new().with(Broken).with(seen.clone());
    let error = all.write(&record(1, 1.0).scalar("loss", 1.0)).unwrap_err();
    assert!(error.to_string().starts_with("here: "), "{error}");
    assert_eq!(seen.scalars("loss"), [(1, 1.0)]);
    assert_eq!(seen.scalars("other"), []);
}

#[test]
fn a_name_appears_once() {
    let twice = record(1, 1.0).scalar("a", 1.0).scalar("b", 2.0).scalar("a", 3.0);
    assert_eq!(twice.scalars().collect::<Vec<_>>(), [("a", 3.0), ("b", 2.0)]);
}

/// Lines that a terminal of a file wrote of some records.
fn lines_of(terminal: impl FnOnce(Terminal) -> Terminal, records: &[Record]) -> Vec<String> {
    let text = Shared::default();
    let mut sink = terminal(Terminal::lines_to(text.clone()).every(Duration::from_secs(1000)));
    records.iter().for_each(|record| sink.write(record).unwrap());
    sink.flush().unwrap();
    let written = text.0.lock().unwrap().clone();
    String::from_utf8(written).unwrap().lines().map(String::from).collect()
}

#[test]
fn values_that_are_announced_have_lines_of_their_own() {
    let evaluated = |step: u64| record(step, step as f64).scalar("loss", 2.0).scalar("validation/loss", 1.5);
    let all = [record(1, 1.0).scalar("loss", 3.0), evaluated(2), record(3, 3.0).scalar("loss", 1.0), evaluated(4)];
    let announced = lines_of(|terminal| terminal.announce(["validation/loss"]), &all);
    assert_eq!(announced.len(), 3, "{announced:?}");
    assert!(announced[1].starts_with("step 2") && announced[1].contains("validation/loss 1.5000"), "{announced:?}");
    assert_eq!(lines_of(|terminal| terminal, &all).len(), 2);
}

#[test]
fn how_much_is_left_is_told_with_a_record() {
    let at = |step: u64, fraction: f64| Record { fraction: Some(fraction), ..record(step, 10.0 * step as f64) };
    let all = [at(1, 0.1), at(2, 0.2).scalar("validation/loss", 1.0)];
    let lines = lines_of(|terminal| terminal.announce(["validation/loss"]), &all);
    // A tenth took ten seconds, and eight are left.
    assert_eq!(lines[1], "step 2 (20 %)  1m20s left  validation/loss 1.0000");
    let lines = lines_of(|terminal| terminal.steps(4).announce(["validation/loss"]), &all);
    assert_eq!(lines[1], "step 2/4  20s left  validation/loss 1.0000", "steps that were told count more");
}

#[test]
fn lines_of_one_step_are_one_record() {
    let folder = Folder::new("two-lines");
    let mut sink = Jsonl::in_folder(&folder).unwrap();
    sink.write(&record(1, 1.0).scalar("loss", 3.0)).unwrap();
    sink.write(&record(2, 2.0).scalar("loss", 2.0).scalar("b", 5.0)).unwrap();
    sink.write(&record(2, 3.0).scalar("a", 1.0).scalar("b", 6.0)).unwrap();
    sink.flush().unwrap();
    let read = read_jsonl(sink.path()).unwrap();
    let scalars = |i: usize| read[i].scalars().map(|(name, value)| (name.to_string(), value)).collect::<Vec<_>>();
    assert_eq!(read.len(), 2);
    assert_eq!(scalars(1), [("a".into(), 1.0), ("b".into(), 6.0), ("loss".into(), 2.0)]);
    assert_eq!(read[1].seconds(), 3.0);
}

#[test]
fn a_new_run_replaces_the_lines_of_another_once_it_has_one() {
    let folder = Folder::new("replacing");
    let steps = |sink: &Jsonl| read_jsonl(sink.path()).unwrap().iter().map(|record| record.step).collect::<Vec<_>>();
    let mut sink = Jsonl::in_folder(&folder).unwrap();
    (1..=3).for_each(|step| sink.write(&record(step, 1.0).scalar("loss", 1.0)).unwrap());
    drop(sink);
    let summary = fs::read_to_string(folder.path("summary.json")).unwrap();
    let mut sink = Jsonl::replacing(&folder).unwrap();
    sink.flush().unwrap();
    assert_eq!(steps(&sink), [1, 2, 3]);
    drop(sink);
    assert_eq!(fs::read_to_string(folder.path("summary.json")).unwrap(), summary);
    let mut sink = Jsonl::replacing(&folder).unwrap();
    (1..=2).for_each(|step| sink.write(&record(step, 1.0).scalar("loss", 1.0)).unwrap());
    assert_eq!(steps(&sink), [1, 2]);
}

/// The records of a file of W&B, each with its number, its kind and its content.
fn records_of_wandb(bytes: &[u8]) -> Vec<Vec<u8>> {
    assert_eq!(&bytes[..7], b":W&B\xe1\xbe\0");
    let (mut at, mut records, mut record, mut is_begun) = (7, Vec::new(), Vec::new(), false);
    while at < bytes.len() {
        let left = (1 << 15) - at % (1 << 15);
        if left < 7 {
            assert!(bytes[at..at + left].iter().all(|&byte| byte == 0));
            at += left;
            continue;
        }
        let length = usize::from(u16::from_le_bytes([bytes[at + 4], bytes[at + 5]]));
        let (place, data) = (bytes[at + 6], &bytes[at + 7..at + 7 + length]);
        let sum = crc32fast::hash(&bytes[at + 6..at + 7 + length]);
        assert_eq!(u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()), sum, "at {at}");
        // The first part of a record may have no bytes, where a block has no more place.
        assert_eq!(is_begun, place == 3 || place == 4);
        is_begun = place == 2 || place == 3;
        record.extend_from_slice(data);
        at += 7 + length;
        if place == 1 || place == 4 {
            records.push(std::mem::take(&mut record));
        }
    }
    records
}

#[test]
fn a_run_of_wandb_has_its_values_its_options_and_its_end() {
    let folder = Folder::new("wandb");
    let sink =
        Wandb::in_folder(&folder, "models").unwrap().name("first").configuration([("lr", "0.5"), ("arch", "gpt")]);
    let path = sink.path().to_owned();
    let mut sink = sink;
    let text = "word ".repeat(20_000);
    let long = record(3, 2.0).scalar("loss", 0.25).scalar("bad", f64::NAN).with("sample", Value::Text(text.clone()));
    sink.write(&long.with("weights", Value::Histogram(Histogram::of(&[1.0f32, -2.0])))).unwrap();
    for step in 4..2_000 {
        sink.write(&record(step, step as f64).scalar("loss", 1.0 / step as f64)).unwrap();
    }
    sink.flush().unwrap();
    drop(sink);
    assert!(path.parent().unwrap().file_name().unwrap().to_str().unwrap().starts_with("offline-run-"));
    let records = records_of_wandb(&fs::read(&path).unwrap());
    let has = |k: usize, words: &str| {
        let found = records[k].windows(words.len()).any(|bytes| bytes == words.as_bytes());
        assert!(found, "record {k} has no {words}");
    };
    // The version, the run, 1997 steps, two summaries and the end.
    assert_eq!(records.len(), 2 + 1_997 + 2 + 1);
    ["first", "models", "\"gpt\"", "0.5"].iter().for_each(|words| has(1, words));
    ["loss", "0.25", "NaN", "_step", text.trim_end(), "{\"_type\":\"histogram\""]
        .iter()
        .for_each(|words| has(2, words));
    has(2_000, "NaN");
    has(2_000, "0.0005002501250625312");
}

#[test]
fn a_run_of_mlflow_has_its_metrics_its_parameters_and_its_end() {
    let folder = Folder::new("mlflow");
    let begin = |name| Mlflow::in_folder(folder.path("runs"), "it's one", name).unwrap();
    let mut sink = begin("first").configuration([("lr", "0.5"), ("../up", "x")]).unwrap();
    let run = sink.folder().to_owned();
    let read = |path: &str| fs::read_to_string(run.join(path)).unwrap_or_else(|error| panic!("{path}: {error}"));
    sink.write(&record(3, 2.5).scalar("train/loss", 0.25).scalar("bad", f64::NAN)).unwrap();
    sink.write(&record(4, 3.0).scalar("train/loss", 0.125).scalar("a,b", f64::INFINITY)).unwrap();
    sink.flush().unwrap();
    assert!(read("meta.yaml").contains("status: 1\n") && read("meta.yaml").contains("end_time: null\n"));
    drop(sink);
    assert!(read("meta.yaml").contains("status: 3\n") && read("meta.yaml").contains("run_name: 'first'\n"));
    assert_eq!(read("metrics/train/loss"), "2500 0.25 3\n3000 0.125 4\n");
    assert_eq!((read("metrics/bad"), read("metrics/a_b")), ("2500 nan 3\n".into(), "3000 inf 4\n".into()));
    assert_eq!((read("params/lr"), read("params/_/up")), ("0.5".into(), "x".into()));
    assert_eq!(read("../meta.yaml").lines().last(), Some("name: 'it''s one'"));
    // Names that get in each other's way have files of their own.
    let mut crowded = begin("crowded");
    for names in [["loss", "loss/validation", "a#b"], ["loss_validation", "a%b", "x/y"], ["x", "कि", "loss"]] {
        let at = |record: Record, (name, value): (&str, f64)| record.scalar(name, value);
        crowded.write(&names.into_iter().zip([1.0, 2.0, 3.0]).fold(record(1, 1.0), at)).unwrap();
    }
    let file = |name: &str| fs::read_to_string(crowded.folder().join("metrics").join(name)).unwrap();
    assert_eq!(file("loss"), "1000 1 1\n1000 3 1\n");
    for (name, value) in
        [("loss_validation", 2), ("loss_validation_", 1), ("a_b", 3), ("a_b_", 2), ("x_", 1), ("x/y", 3)]
    {
        assert_eq!(file(name), format!("1000 {value} 1\n"), "{name}");
    }
    drop(crowded);
    // A second run is in the same experiment, and one that panics has failed.
    let second = begin("second");
    assert_eq!(second.folder().parent(), run.parent());
    let meta = second.folder().join("meta.yaml");
    std::thread::spawn(move || {
        let _second = second;
        panic!("no more data");
    })
    .join()
    .unwrap_err();
    assert!(fs::read_to_string(meta).unwrap().contains("status: 4\n"));
}
