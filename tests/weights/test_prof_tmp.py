import time, cProfile, pstats
def test_x():
    from glm_jax.weights.names import tensor_table, expected_tensors
    from glm_jax.weights.plan import plan_load
    from glm_jax.model.presets import PRESETS
    c=PRESETS["glm-5.3"]
    t=time.process_time(); tensor_table(c); print("table",time.process_time()-t)
    t=time.process_time(); e=expected_tensors(c,True); print("exp",time.process_time()-t)
    p=cProfile.Profile(); t=time.process_time(); p.enable(); plan_load(e,c); p.disable(); print("plan",time.process_time()-t)
    pstats.Stats(p).sort_stats("tottime").print_stats(14)
