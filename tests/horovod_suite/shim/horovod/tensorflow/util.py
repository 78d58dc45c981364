import tensorflow as tf

_executing_eagerly = tf.executing_eagerly
