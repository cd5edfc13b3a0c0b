//! The program `weftgrad-watch`, where its output is no terminal.
#![cfg(feature = "terminal")]

use std::process::{Command, Output};

use watch::sink::{Jsonl, Record, Sink};

fn program(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_weftgrad-watch")).args(arguments).output().unwrap()
}

#[test]
fn one_screen_is_printed() {
    let folder = std::env::temp_dir().join(format!("weftgrad-watch-{}-program", std::process::id()));
    Jsonl::in_folder(&folder).unwrap().write(&Record::new(7, 0).scalar("loss", 0.5)).unwrap();
    let run = folder.to_str().unwrap();
    let output = program(&[run, "no/such/run"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success() && output.stderr.is_empty());
    assert!(text.contains(": step 7, epoch 0") && text.contains("run: waits for no/such/run/metrics.jsonl"), "{text}");
    assert_eq!(text.lines().count(), 32);
    for wrong in [&[][..], &[run, "--every", "0"], &[run, "--every", "soon"]] {
        assert_eq!(program(wrong).status.code(), Some(2), "{wrong:?}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}
