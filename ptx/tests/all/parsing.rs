//! Texts that are refused, with the line and the name of the reason.

use ptx::PtxModule;

fn refusal(body: &str) -> String {
    let text =
        format!(".version 8.0\n.visible .entry k(.param .u64 a)\n{{\n.reg .b32 %r<4>; .reg .b64 %d<4>;\n{body}\n}}");
    PtxModule::parse(&text).unwrap_err().to_string()
}

#[test]
fn unknown_opcodes_and_modifiers_are_named() {
    for opcode in
        ["frobnicate.b32", "add.sat.s32", "ld.weird.u32", "ld.global.v3.u32", "shfl.down.b32", "cvt.rz.f32.f64"]
    {
        let error = refusal(&format!("{opcode} %r1, %r2;"));
        assert!(error.starts_with(&format!("PTX line 5: unknown opcode `{opcode}`")), "{error}");
    }
    for (statement, words) in [
        ("wmma.load.a.sync.aligned.row.m16n16k16.f16 {%r1}, [%d1];", "unknown opcode `wmma.load"),
        ("bar.sync 1;", "unknown opcode `bar.sync`"),
        ("atom.global.cas.b32 %r1, [%d1], %r2;", "unknown opcode `atom.global.cas.b32`"),
        ("ld.u32 %r1, [%d1];", "unknown opcode `ld.u32`"),
        ("add.s32 %r1, %r2;", "with other operands"),
        ("add.s32 %r1, %r2, %d1;", "the operand `%d1` has not the size"),
        ("add.s32 %r1, %r2, %r9;", "unknown name `%r9`"),
        ("mov.u32 %r1, %clock;", "unknown name `%clock`"),
        ("bra $nowhere;", "no label `$nowhere`"),
        (".surfref x;", "unknown directive `.surfref`"),
        ("call.uni helper, (%r1);", "a call of `helper`, which the module does not define"),
        ("mov.u32 %r1, 12", "ends too early"),
    ] {
        let error = refusal(statement);
        assert!(error.contains(words), "{statement}: {error}");
    }
}

#[test]
fn directives_are_known_or_named() {
    let error = PtxModule::parse(".version 8.0\n.texref t;").unwrap_err().to_string();
    assert_eq!(error, "PTX line 2: unknown directive `.texref`");
    let module = PtxModule::parse(
        "\t.file 1 \"k\"\n.extern .shared .align 16 .b8 all[];\n.section .debug_str\n{\n x:\n.b8 1\n}\n",
    );
    assert!(module.unwrap().kernels().is_empty());
}
