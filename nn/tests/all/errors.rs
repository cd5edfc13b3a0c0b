//! Errors say where: the part of the model, and the parameters among the operands.

use autograd::{Var, checkpoint};
use nn::{loss::Reduction, *};
use numcore::{
    DType, ErrorKind, NullRuntime, Result, Tensor, Within,
    fused::{Conv1dOptions, NnOps},
    ops::{
        Apply, FftNorm, FftOps, IndexingOps, MatmulOps, PointwiseOps, ReduceOps, ViewOps, einsum, non_max_suppression,
    },
};

type Rt = NullRuntime;

fn init() -> Init<Rt> {
    Init::new(&NullRuntime::new(), 0)
}

fn input(shape: impl AsRef<[usize]>) -> Var<Rt> {
    Var::new(Tensor::ones(&NullRuntime::new(), shape, DType::F32).unwrap())
}

fn message<T>(result: Result<T>) -> String {
    result.map(|_| ()).unwrap_err().to_string()
}

#[derive(Module)]
struct Mlp<R: nn::Runtime> {
    fc1: Linear<R>,
    fc2: Linear<R>,
}

impl Forward<Rt> for Mlp<Rt> {
    fn forward(&self, x: &Var<Rt>) -> Result<Var<Rt>> {
        self.fc2.forward(&self.fc1.forward(x)?.narrow(1, 0, 2)?)
    }
}

/// The line above that calls the second layer, with an input that does not fit.
const SECOND_LAYER: u32 = line!() - 5;

fn mlp() -> Mlp<Rt> {
    let model = Mlp { fc1: Linear::new(&init(), 3, 4).unwrap(), fc2: Linear::new(&init(), 4, 2).unwrap() };
    model.parameters();
    model
}

#[test]
fn an_op_names_the_parameters_among_its_operands() {
    let (model, line) = (mlp(), line!() + 2);
    assert_eq!(
        message(model.fc1.forward(&input([2, 5]))),
        format!(
            "linear: shapes [2, 5], [4, 3], [4]: x has 5 features, the weight takes 3 \
             (`fc1.weight` is f32 [4, 3]; `fc1.bias` is f32 [4]), at {}:{line}:27",
            file!()
        )
    );
    let wrong_dtype = Var::new(Tensor::ones(&NullRuntime::new(), [2, 4], DType::F64).unwrap());
    let error = message(model.fc2.forward(&wrong_dtype));
    assert!(error.contains("`fc2.weight` is f32 [2, 4]"), "{error}");
    // Before a model has names, a layer has.
    let error = message(Linear::new(&init(), 3, 4).unwrap().forward(&input([2, 5])));
    assert!(error.contains("(`weight` is f32 [4, 3]; `bias` is f32 [4])"), "{error}");
    let sizes = GptConfig { vocab: 5, context: 4, layers: 1, heads: 1, width: 4, ..Default::default() };
    let error = message(Gpt::new(&init(), sizes).unwrap().forward(&input([1, 2])));
    assert!(error.contains("`wte.weight` is f32 [5, 4]"), "{error}");
    // Nothing is known of operands that are no parameters.
    let error = message(input([2, 3]).matmul(&input([5, 3])));
    assert!(!error.contains('`') && error.starts_with("matmul: "), "{error}");
}

#[test]
fn a_parameter_used_through_a_view_is_named() {
    let weight = mlp().fc1.weight.var();
    let error = message(input([2, 2]).matmul(&weight.transpose(0, 1).unwrap().narrow(1, 0, 2).unwrap()));
    assert!(error.contains("(`fc1.weight` is f32 [4, 3], seen as [3, 2])"), "{error}");
    // An error in a view names the tensor that is viewed.
    assert!(message(weight.narrow(0, 3, 2)).contains("(`fc1.weight` is f32 [4, 3])"));
    assert!(message(weight.add(&input([5]))).contains("(`fc1.weight` is f32 [4, 3])"));
}

#[test]
fn frozen_parameters_are_named_too_and_without_gradients() {
    let model = mlp();
    model.fc1.weight.set_requires_grad(false);
    let failing = || model.fc1.forward(&input([2, 5]));
    assert!(message(failing()).contains("`fc1.weight`"));
    assert!(message(autograd::no_grad(failing)).contains("`fc1.weight`"));
}

#[test]
fn containers_say_in_which_of_their_parts() {
    let linear = |i, o| Linear::new(&init(), i, o).unwrap();
    let inner = Sequential::new().push(Relu).push(linear(8, 3));
    let model = Sequential::new().push(linear(5, 8)).push(inner).push(linear(4, 4));
    let error = model.forward(&input([2, 5])).unwrap_err();
    assert_eq!(error.path(), "2");
    let error = model.forward(&input([2, 5])).within("encoder").unwrap_err();
    assert_eq!(error.path(), "encoder.2");
    let inner = Sequential::new().push(Relu).push(linear(7, 3));
    let error = Sequential::new().push(linear(5, 8)).push(inner).forward(&input([2, 5])).unwrap_err();
    assert_eq!(error.path(), "1.1");
    assert!(error.to_string().starts_with("in `1.1`: linear: "), "{error}");
}

#[test]
fn a_gpt_names_the_block() {
    let config = GptConfig { vocab: 7, context: 8, layers: 3, heads: 2, width: 8, ..GptConfig::default() };
    let mut model = Gpt::new(&init(), config).unwrap();
    model.blocks[1].fc1 = Linear::new(&init(), 9, 32).unwrap();
    model.parameters();
    let tokens = Var::new(Tensor::zeros(&NullRuntime::new(), [1, 4], DType::I64).unwrap());
    let error = model.forward(&tokens).unwrap_err();
    assert_eq!(error.path(), "blocks.1.fc1");
    assert!(error.to_string().contains("`blocks.1.fc1.weight` is f32 [32, 9]"), "{error}");
    let error = model.forward(&tokens.to_dtype(DType::F32).unwrap()).unwrap_err();
    assert_eq!(error.path(), "wte");
}

#[test]
fn an_error_within_a_checkpoint_keeps_what_it_says() {
    let config = BlockConfig { width: 8, heads: 2, bias: true, dropout: 0.0, activation: Activation::Gelu };
    let block = Block::new(&init(), config).unwrap();
    block.parameters();
    let error = checkpoint(|| block.forward(&input([1, 3, 6])).within("block"));
    let error = error.map(|_| ()).unwrap_err();
    assert_eq!(error.path(), "block.ln1");
    assert!(matches!(error.kind(), ErrorKind::Shape { .. }));
    assert!(error.to_string().contains("`ln1.weight` is f32 [8]"), "{error}");
}

#[test]
fn an_index_that_is_out_of_range_names_the_table() {
    use runtime_cpu::Cpu;
    let cpu = Cpu::with_threads(1);
    let table = Embedding::new(&Init::new(&cpu, 0), 5, 2).unwrap();
    table.parameters();
    let tokens = Var::new(Tensor::from_slice(&cpu, [1, 2], &[1i64, 9]).unwrap());
    let error = message(table.forward(&tokens));
    assert!(error.contains("`weight` is f32 [5, 2]"), "{error}");
}

/// The line of the call that ran [`Apply::apply1`] is in the error, and a function between that hands its caller's line
/// on is left out.
#[test]
fn an_error_says_at_which_line_the_op_was_applied() {
    #[track_caller]
    fn negated<T: Apply>(x: &T, y: &T) -> Result<T> {
        T::apply1(numcore::ops::Matmul, &[x, y])
    }
    let line = line!() + 1;
    let error = negated(&input([2, 3]), &input([5, 3])).unwrap_err();
    assert_eq!(error.location().map(|at| (at.file(), at.line())), Some((file!(), line)));
    assert!(error.to_string().ends_with(&format!(", at {}:{line}:17", file!())), "{error}");
    let tensor = || input([2, 3]).value().unwrap();
    let line = line!() + 1;
    let error = negated(&tensor(), &tensor()).unwrap_err();
    assert_eq!(error.location().map(|at| at.line()), Some(line));
}

/// Every layer hands its caller's line on to its ops.
#[test]
fn an_error_in_a_layer_says_at_which_line_the_layer_was_called() {
    macro_rules! refuses {
        ($($layer:expr, $shape:expr;)*) => {$(
            let (layer, x) = ($layer, input($shape));
            let error = layer.forward(&x).unwrap_err();
            assert_eq!(error.location().map(|at| at.file()), Some(file!()), "{}: {error}", stringify!($layer));
        )*};
    }
    let init = &init();
    let config = BlockConfig { width: 8, heads: 2, bias: true, dropout: 0.0, activation: Activation::Gelu };
    refuses! {
        Linear::new(init, 3, 4).unwrap(), [2, 5];
        TransposedLinear::new(init, 3, 4).unwrap(), [2, 5];
        Conv1d::new(init, 3, 4, 2, Default::default()).unwrap(), [1, 2, 5];
        Conv2d::new(init, 3, 4, [2, 2], Default::default()).unwrap(), [1, 2, 5, 5];
        ConvTranspose2d::new(init, 3, 4, [2, 2], Default::default()).unwrap(), [1, 2, 5, 5];
        BatchNorm1d::new(init, 3).unwrap(), [1, 3];
        LayerNorm::new(init, 3).unwrap(), [2, 5];
        RmsNorm::new(init, 3).unwrap(), [2, 5];
        GroupNorm::new(init, 2, 4).unwrap(), [2, 3];
        Embedding::new(init, 5, 2).unwrap(), [2];
        MaxPool2d::new(2), [3];
        AvgPool2d::new(2), [3];
        PixelShuffle { factor: 2 }, [3];
        LogSoftmax { axis: 7 }, [3];
        MultiHeadAttention::new(init, 8, 2).unwrap(), [1, 3, 6];
        Gru::new(init, RecurrentConfig::new(3, 4)).unwrap(), [1, 2, 5];
        Lstm::new(init, RecurrentConfig::new(3, 4)).unwrap(), [2];
        Block::new(init, config).unwrap(), [1, 3, 6];
        Sequential::new().push(Relu).push(Linear::new(init, 3, 4).unwrap()), [2, 5];
        Box::new(Linear::new(init, 3, 4).unwrap()), [2, 5];
    }
    let line = line!() + 1;
    let error = mlp().fc1.forward(&input([2, 5])).unwrap_err();
    assert_eq!(error.location().map(|at| at.line()), Some(line));
}

/// A model of one's own shows the line within it that called the layer, whoever called the model.
#[test]
fn an_error_in_ones_own_model_says_at_which_line_of_the_model() {
    let error = Sequential::new().push(mlp()).forward(&input([2, 3])).unwrap_err();
    assert_eq!(error.location().map(|at| at.line()), Some(SECOND_LAYER), "{error}");
}

#[test]
fn an_error_in_a_loss_says_at_which_line_the_loss_was_called() {
    let (x, y) = (input([2, 3]), input([2, 4]));
    let errors = [
        loss::mse(&x, &y, Reduction::Mean),
        loss::smooth_l1(&x, &y, 0.0, Reduction::Mean),
        loss::smooth_l1(&x, &x, -1.0, Reduction::Mean),
        loss::huber(&x, &x, 0.0, Reduction::Mean),
        loss::kl_div_batchmean(&x, &y),
        loss::cross_entropy(&x, &y),
        loss::nll(&x, &y, Default::default()),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "loss {k}: {error}");
    }
    let line = line!() + 1;
    let error = loss::mse(&x, &y, Reduction::Mean).unwrap_err();
    assert_eq!(error.location().map(|at| at.line()), Some(line));
}

/// What fails without an op call has the caller's line too.
#[test]
fn arguments_have_the_line_of_the_caller() {
    let (rt, x) = (NullRuntime::new(), input([2, 3]));
    let t = Tensor::ones(&rt, [2, 3], DType::F32).unwrap();
    let errors = [
        x.i((.., 3)).map(|_| ()),
        x.i((0, 0, 0)).map(|_| ()),
        x.i(5..9).map(|_| ()),
        x.softmax(2).map(|_| ()),
        x.sum(&[2]).map(|_| ()),
        x.sum(&[0, 0]).map(|_| ()),
        einsum("ab,bc->az", &[&x, &x]).map(|_| ()),
        Tensor::from_slice(&rt, [3], &[1f32]).map(|_| ()),
        t.to_vec::<f64>().map(|_| ()),
        t.item().map(|_| ()),
        t.item_as::<i64>().map(|_| ()),
        Dropout::new(2.0).map(|_| ()),
        GroupNorm::new(&init(), 2, 3).map(|_| ()),
        Conv2d::new(&init(), 1, 1, [0, 3], Default::default()).map(|_| ()),
        MultiHeadAttention::new(&init(), 8, 3).map(|_| ()),
        CausalSelfAttention::new(&init(), 8, 3).map(|_| ()),
        Embedding::new(&init(), 5, 2).unwrap().with_padding_idx(5).map(|_| ()),
        Embedding::new(&init(), 5, 2).unwrap().with_frozen_row(5).map(|_| ()),
        ConvTranspose1d::new(&init(), 1, 1, 3, Default::default()).unwrap().with_output_padding([1]).map(|_| ()),
        Gru::new(&init(), RecurrentConfig { layers: 0, ..RecurrentConfig::new(3, 4) }).map(|_| ()),
        Gru::new(&init(), RecurrentConfig { reverse: true, bidirectional: true, ..RecurrentConfig::new(3, 4) })
            .map(|_| ()),
        Conv1d::new(&init(), 3, 1, 3, Conv1dOptions { groups: 2, ..Default::default() }).map(|_| ()),
        Tensor::zeros(&rt, [usize::MAX, 2], DType::F32).map(|_| ()),
        Tensor::ones(&rt, [1; 9], DType::F32).map(|_| ()),
        Tensor::full(&rt, [2], DType::U8, 300i64).map(|_| ()),
        Tensor::arange(&rt, 0i64, 1i64, 300, DType::U8).map(|_| ()),
        Tensor::eye(&rt, usize::MAX, DType::F32).map(|_| ()),
        Tensor::uniform(&rt, [2], DType::F32, 2.0, 1.0, 0).map(|_| ()),
        Tensor::normal(&rt, [2], DType::I64, 0.0, 1.0, 0).map(|_| ()),
        Tensor::bernoulli(&rt, [2], 2.0, 0).map(|_| ()),
        Tensor::permutation(&rt, usize::MAX, 0).map(|_| ()),
        Tensor::from_bytes(&rt, *t.shape(), DType::F32, &[0]).map(|_| ()),
        t.unique_along(2).map(|_| ()),
        t.bincount(None, 0).map(|_| ()),
        t.fft(None, 2, FftNorm::Backward).map(|_| ()),
        t.rfft(None, 2, FftNorm::Backward).map(|_| ()),
        t.irfft(None, -1, FftNorm::Backward).map(|_| ()),
        t.fftn(&[], FftNorm::Backward).map(|_| ()),
        t.fftshift(&[2]).map(|_| ()),
        non_max_suppression(&t, &t, 0.5).map(|_| ()),
        Var::leaf("w", Tensor::ones(&rt, [2], DType::I64).unwrap()).map(|_| ()),
        x.item().map(|_| ()),
        Linear::new(&init(), usize::MAX, 2).map(|_| ()),
        LayerNorm::new(&init(), usize::MAX).map(|_| ()),
        nn::moe::TokenOrder::new(&[0, 5], 1, 2).map(|_| ()),
        mlp().load_state_dict(Vec::new()),
        mlp().load_safetensors("no such file"),
    ];
    for (k, error) in errors.into_iter().map(Result::unwrap_err).enumerate() {
        assert_eq!(error.location().map(|at| at.file()), Some(file!()), "argument {k}: {error}");
    }
}

#[test]
fn an_embedding_of_floats_names_itself_and_its_table() {
    let table = Sequential::new().push(Embedding::new(&init(), 4, 2).unwrap());
    table.parameters();
    let error = message(table.forward(&input([3])));
    assert!(error.contains("embedding: dtypes f32") && error.contains("`0.weight`"), "{error}");
}
