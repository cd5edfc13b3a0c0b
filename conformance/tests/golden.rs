//! The runner of reference values: it passes correct values, and reports wrong ones.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
};

use conformance::golden::{Options, Outcome, load, run_case};
use runtime_cpu::Cpu;

/// A folder of its own, removed at the end.
struct Scratch(PathBuf);

impl Scratch {
    fn new(name: &str) -> Scratch {
        let path = std::env::temp_dir().join(format!("conformance-{}-{name}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        Scratch(path)
    }

    /// One group of the reference values, changed.
    fn group(name: &str, group: &str, change: impl Fn(&str) -> String) -> Scratch {
        let scratch = Scratch::new(name);
        let text = fs::read_to_string(conformance::goldens().join(format!("{group}.json"))).unwrap();
        scratch.write(&format!("{group}.json"), change(&text).as_bytes());
        let tensors = conformance::goldens().join(format!("{group}.safetensors"));
        if tensors.is_file() {
            scratch.write(&format!("{group}.safetensors"), &fs::read(tensors).unwrap());
        }
        scratch
    }

    fn write(&self, file: &str, bytes: &[u8]) {
        fs::write(self.0.join(file), bytes).unwrap();
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn golden(folder: &Path, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_golden")).arg(folder).args(arguments).output().unwrap()
}

fn lines(output: &Output) -> Vec<String> {
    String::from_utf8_lossy(&output.stdout).lines().map(str::to_string).collect()
}

/// The lines of the cases that failed.
fn failures(folder: &Path) -> Vec<String> {
    let output = golden(folder, &[]);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    let mut lines = lines(&output);
    let tally = lines.pop().unwrap();
    assert!(tally.contains(&format!(" {} failed, 0 skipped", lines.len())), "{tally}");
    lines
}

/// The output when every case of these groups passes.
fn all_passed(groups: &[&str]) -> String {
    let groups: Vec<String> = groups.iter().map(|g| g.to_string()).collect();
    format!("{} passed, 0 failed, 0 skipped", load(conformance::goldens(), &groups).unwrap().len())
}

#[test]
fn all_reference_values_are_met() {
    for arguments in [&["--threads", "1"][..], &["--device", "cpu", "--views"]] {
        let output = golden(conformance::goldens(), arguments);
        assert!(output.status.success(), "{output:?}");
        assert_eq!(lines(&output), [all_passed(&[])]);
    }
}

#[test]
fn groups_can_be_chosen() {
    let output = golden(conformance::goldens(), &["lr", "loss"]);
    assert_eq!(lines(&output), [all_passed(&["lr", "loss"])]);
    assert_ne!(all_passed(&["lr", "loss"]), all_passed(&[]));
}

#[test]
fn a_wrong_value_fails_its_case_alone() {
    let scratch = Scratch::group("value", "matmul", str::to_string);
    let file = scratch.0.join("matmul.safetensors");
    let mut bytes = fs::read(&file).unwrap();
    // The last value of the file: one element of one tensor.
    let at = bytes.len() - 4;
    let value = f32::from_le_bytes(bytes[at..].try_into().unwrap());
    bytes[at..].copy_from_slice(&(value + 0.5).to_le_bytes());
    fs::write(&file, bytes).unwrap();
    let failures = failures(&scratch.0);
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].starts_with("FAIL matmul.") && failures[0].contains("max error"), "{failures:?}");
}

#[test]
fn an_unknown_op_and_an_unknown_attribute_are_failures() {
    let scratch = Scratch::group("op", "shape", |t| t.replace(r#""op": "flip""#, r#""op": "fold_origami""#));
    let failed = failures(&scratch.0);
    assert!(failed.len() == 1 && failed[0].contains("fold_origami"), "{failed:?}");
    let scratch = Scratch::group("attribute", "shape", |t| t.replace(r#""shift": 1"#, r#""shift": 1, "twist": true"#));
    let failed = failures(&scratch.0);
    assert!(failed.len() == 1 && failed[0].contains("twist"), "{failed:?}");
}

#[test]
fn another_rate_another_loss_and_another_tolerance_are_failures() {
    let scratch = Scratch::group("rate", "lr", |t| t.replacen("0.0857375", "0.0857376", 1));
    assert_eq!(failures(&scratch.0).len(), 1);
    let scratch = Scratch::group("loss", "train", |t| t.replacen("1.147690773010254", "1.157690773010254", 1));
    let failed = failures(&scratch.0);
    assert!(failed.len() == 1 && failed[0].contains("losses"), "{failed:?}");
    let scratch = Scratch::group("tolerance", "optim", |t| t.replace("1e-05", "1e-30"));
    assert!(!failures(&scratch.0).is_empty());
}

#[test]
fn files_that_cannot_be_read_are_one_clear_error() {
    let missing = Scratch::group("missing", "nn", str::to_string);
    fs::remove_file(missing.0.join("nn.safetensors")).unwrap();
    let cut = Scratch::group("cut", "nn", str::to_string);
    let file = cut.0.join("nn.safetensors");
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    let garbled = Scratch::group("garbled", "nn", |t| t.replace('}', ""));
    let headless = Scratch::group("headless", "nn", |_| r#"{"cases": [{"id": "x"}]}"#.into());
    let empty = Scratch::new("empty");
    let none = PathBuf::from("no/such/folder");
    for (folder, word) in [
        (&missing.0, "nn.safetensors"),
        (&cut.0, "nn.safetensors"),
        (&garbled.0, "nn.json"),
        (&headless.0, "has no `op`"),
        (&empty.0, "holds no group"),
        (&none, "no/such/folder"),
    ] {
        let output = golden(folder, &[]);
        let message = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{message}");
        assert!(message.starts_with("error: ") && message.contains(word) && message.lines().count() == 1, "{message}");
        assert!(output.stdout.is_empty());
    }
}

#[test]
fn arguments_that_make_no_sense_are_errors() {
    for arguments in [&["--device", "abacus"][..], &["--threads", "many"], &["--fast"], &["--threads"], &["no_group"]] {
        let output = golden(conformance::goldens(), arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
    }
}

#[test]
fn a_case_without_its_tensors_fails_and_the_others_run() {
    let scratch = Scratch::group("tensors", "loss", |t| t.replace("loss.002.mse", "loss.999.mse"));
    let cases = load(&scratch.0, &[]).unwrap();
    let outcomes: Vec<Outcome> = cases.iter().map(|c| run_case(&Cpu::new(), c, Options::default())).collect();
    let failed: Vec<String> =
        outcomes.iter().filter(|o| matches!(o, Outcome::Failed(_))).map(|o| o.to_string()).collect();
    assert!(failed.len() == 1 && failed[0].contains("in0"), "{failed:?}");
}
