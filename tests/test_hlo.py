"""What is read from the text of optimised programs.

`MATMUL` was written by the real TPU compiler (jax 0.10.2, libtpu 0.0.52, v5e:2x4; lines are shortened in their
metadata and backend_config alone): the gradient of `(x @ w).astype(float32).sum()` for a bfloat16 w [1024, 4096],
replicated, and x [4096, 1024], divided over eight chips. The other texts are made by hand in the same form.
"""

import jax
import jax.numpy as jnp

from vitplast_jax import sharding
from vitplast_jax.training import hlo

MATMUL = """HloModule jit__lambda, is_scheduled=true, num_partitions=8

%bitcast_fusion (bitcast_input: bf16[512,1024]) -> bf16[512,1024] {
  %bitcast_input = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  ROOT %bitcast = bf16[512,1024]{1,0:T(8,128)(2,1)} bitcast(%bitcast_input)
}

%fused_computation.1 () -> bf16[512,4096] {
  %constant.2.clone.4 = bf16[]{:T(256)} constant(1)
  ROOT %broadcast_in_dim.4 = bf16[512,4096]{1,0:T(8,128)(2,1)} broadcast(%constant.2.clone.4), dimensions={}
}

%fused_computation (param_0: bf16[512,1024]) -> bf16[1024,4096] {
  %param_0 = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} parameter(0)
  %fusion.3 = bf16[512,1024]{1,0:T(8,128)(2,1)} fusion(%param_0), kind=kLoop, calls=%bitcast_fusion
  %fusion.1 = bf16[512,4096]{1,0:T(8,128)(2,1)} fusion(), kind=kLoop, calls=%fused_computation.1
  ROOT %convolution.1 = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} convolution(%fusion.3, %fusion.1), dim_labels=fb_io->bf
}

%add.clone (x.3: bf16[], y.1: bf16[]) -> bf16[] {
  %y.1 = bf16[]{:T(256)} parameter(1)
  %x.3 = bf16[]{:T(256)} parameter(0)
  ROOT %add.1 = bf16[]{:T(256)} add(%x.3, %y.1)
}

ENTRY %main.0_spmd (param: bf16[512,1024]) -> bf16[1024,4096] {
  %param = bf16[512,1024]{1,0:T(8,128)(2,1)} parameter(0), metadata={op_name="x"}
  %copy-start = (bf16[512,1024]{1,0:T(8,128)(2,1)S(1)}, bf16[512,1024]{1,0:T(8,128)(2,1)}, u32[]{:S(2)}) copy-start(%param), cross_program_prefetch_index=0
  %copy-done = bf16[512,1024]{1,0:T(8,128)(2,1)S(1)} copy-done(%copy-start)
  %fusion = bf16[1024,4096]{1,0:T(8,128)(2,1)S(1)} fusion(%copy-done), kind=kOutput, calls=%fused_computation, backend_config={"flag_configs":[],"window_config":{"kernel_window_bounds":["64","8"],"estimated_cycles":"49760","iteration_bounds":["4","1","1"]}}
  ROOT %all-reduce = bf16[1024,4096]{1,0:T(8,128)(2,1)} all-reduce(%fusion), channel_id=1, replica_groups=mesh['axis_0'=8] {'axis_0'}, use_global_device_ids=true, to_apply=%add.clone, backend_config={"collective_algorithm_config":{"debug":"colors:2"}}
}
"""  # noqa: E501

LOOP = """HloModule loop
%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %work = f32[8]{0} fusion(%p), kind=kLoop, calls=%inner, backend_config={"window_config":{"estimated_cycles":"10"}}
  %all-reduce.2 = (f32[8]{0:T(128)}, f32[2,2]{1,0}) all-reduce(%work, %work), to_apply=%add
  ROOT %t = (s32[], f32[8]{0}) tuple(%p, %work)
}
%inner (q: f32[8]) -> f32[8] {
  %q = f32[8]{0} parameter(0)
  ROOT %n = f32[8]{0} negate(%q), backend_config={"window_config":{"estimated_cycles":"1000"}}
}
%condition (p.1: (s32[], f32[8])) -> pred[] {
  ROOT %less = pred[] compare(%p.1, %p.1), direction=LT
}
%scatter (s: f32[16]) -> f32[2] {
  %s = f32[16]{0} parameter(0)
  ROOT %reduce-scatter.1 = f32[2]{0} reduce-scatter(%s), dimensions={0}, to_apply=%add
}
ENTRY %main (a: f32[8]) -> f32[8] {
  %a = f32[8]{0} parameter(0)
  %while.1 = (s32[], f32[8]{0}) while(%a), condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"4"}}
  %gather = (bf16[4]{0}, bf16[32]{0}) all-gather-start(%a), dimensions={0}
  %gathered = bf16[32]{0} all-gather-done(%gather)
  %permute = (bf16[6]{0}, bf16[6]{0}, u32[], u32[]) collective-permute-start(%a)
  %both = f32[2]{0} fusion(%a), kind=kCustom, calls=%scatter, backend_config={"estimated_cycles":"7"}
  ROOT %last = f32[8]{0} negate(%a)
}
"""  # noqa: E501


def test_the_compilers_text_of_a_gradient():
    assert hlo.collective_bytes(MATMUL) == {"all-reduce": 2 * 1024 * 4096}
    # 512 x 1024 x 4096 multiply-adds on four units of 128 x 128 take 32,768 cycles at best.
    assert hlo.estimated_cycles(MATMUL) == 49760 >= 512 * 1024 * 4096 // (4 * 128**2)


def test_loops_count_by_their_trips_and_fusions_once():
    assert hlo.estimated_cycles(LOOP) == 4 * 10 + 7  # what is inside a fusion is part of the fusion's estimate
    assert hlo.collective_bytes(LOOP) == {
        "all-reduce": 4 * 4 * (8 + 4),
        "all-gather": 2 * 32,  # the start has operand and result, the done is the same collective
        "collective-permute": 2 * 6,
        "reduce-scatter": 4 * 16,  # the array that is reduced, not the part that stays
    }


def test_a_loop_that_counts_up_to_a_constant_says_its_trips_by_that():
    unknown = LOOP.replace(', backend_config={"known_trip_count":{"n":"4"}}', "")
    assert hlo.estimated_cycles(unknown) == 10 + 7
    limit = "%condition (p.1: (s32[], f32[8])) -> pred[] {\n"
    counted = unknown.replace(limit, limit + "  %limit = s32[]{:T(128)} constant(3)\n")
    assert hlo.estimated_cycles(counted) == 3 * 10 + 7


def test_the_text_of_this_machines_compiler_is_read_too():
    mesh = sharding.make_mesh(8, 1)
    rows, everywhere = sharding.batch(mesh), sharding.replicated(mesh)
    x = jax.ShapeDtypeStruct((16, 3), jnp.float32, sharding=rows)
    text = jax.jit(lambda x: x.sum(0), out_shardings=everywhere).lower(x).compile().as_text()
    assert hlo.collective_bytes(text) == {"all-reduce": 4 * 3}
    assert hlo.estimated_cycles(text) == 0
