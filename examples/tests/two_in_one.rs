//! Programs of two features each, which fail unless their numbers are those of one rank: that they run, and learn.
#![allow(missing_docs)]

use std::process::Command;

/// What a program prints.
fn said(program: &str) -> String {
    let output = Command::new(program).output().expect("the program starts");
    assert!(output.status.success(), "{program}:\n{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).into_owned()
}

/// The numbers of a table whose head has these words.
fn numbers(said: &str, of: &str) -> Vec<f64> {
    let rows = said.lines().skip_while(|line| !line.contains(of)).skip(1);
    rows.map_while(|line| line.split_whitespace().nth(2)?.parse().ok()).collect()
}

/// Requires so many losses, the last of them below the first.
fn learns(program: &str, of: &str, count: usize) {
    let said = said(program);
    let losses = numbers(&said, of);
    assert!(losses.len() == count && losses[count - 1] < losses[0], "{said}");
}

#[test]
fn diloco_over_pipelines() {
    learns(env!("CARGO_BIN_EXE_diloco-pipeline"), "DiLoCo over pipelines", 20);
}

#[test]
fn balancing_over_shards() {
    learns(env!("CARGO_BIN_EXE_balanced-zero"), "balanced ZeRO-3", 20);
}

#[test]
fn elastic_experts_in_stages() {
    learns(env!("CARGO_BIN_EXE_elastic-experts"), "elastic experts", 12);
}

#[test]
fn adapters_over_four_bits_on_a_mesh() {
    learns(env!("CARGO_BIN_EXE_qlora-mesh"), "QLoRA on a mesh", 20);
}

#[test]
fn a_policy_in_shards_beside_its_reference() {
    let said = said(env!("CARGO_BIN_EXE_grpo"));
    assert!(said.contains("ratios are 0 from 1 and divergences 0 from 0"), "{said}");
    assert_eq!(said.matches("the mean reward rises").count(), 3, "{said}");
    assert_eq!([numbers(&said, "mean rewards").len(), numbers(&said, "    losses").len()], [8, 16], "{said}");
}

#[test]
fn preferences_in_shards_and_in_a_pipeline() {
    let said = said(env!("CARGO_BIN_EXE_dpo"));
    assert_eq!([numbers(&said, "in shards").len(), numbers(&said, "in a pipeline").len()], [16, 16], "{said}");
}
